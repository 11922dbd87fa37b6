from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)
layer = model.model.layers[10]

with model.trace("The capital of France is", temperature=0.0):
    attn_out = layer.self_attn.output.clone().save()  # [pos, 4096]
    mlp_act = layer.mlp.act_fn.output.clone().save()  # [pos, 12288] post-activation neurons
    mlp_out = layer.mlp.output.clone().save()  # [pos, 4096]

print(attn_out.shape, mlp_act.shape, mlp_out.shape)
