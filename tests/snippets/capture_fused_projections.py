from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)
attn = model.model.layers[10].self_attn
n_heads, n_kv, d = 32, 8, 128

with model.trace("The capital of France is", temperature=0.0):
    qkv = attn.qkv_proj.output[0]  # [pos, (32 + 8 + 8) * 128]
    q, k, v = qkv.split([n_heads * d, n_kv * d, n_kv * d], dim=-1)
    v = v.clone().save()
    gate, up = model.model.layers[10].mlp.gate_up_proj.output[0].chunk(2, dim=-1)
    gate = gate.clone().save()  # pre-activation neurons

print(v.shape, gate.shape)
