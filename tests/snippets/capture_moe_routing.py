import torch
from nnsight_async import VLLM

model = VLLM("Qwen/Qwen1.5-MoE-A2.7B", dispatch=True)
moe = model.model.layers[10].mlp

with model.trace("The capital of France is", temperature=0.0):
    router_logits = moe.gate.output[0].clone().save()  # [pos, n_experts]
    experts_out = moe.experts.output.clone().save()  # [pos, d_model], all experts combined

top = router_logits.float().softmax(-1).topk(4, dim=-1)
print(router_logits.shape, experts_out.shape)
print(top.indices[-1].tolist(), [round(w, 3) for w in top.values[-1].tolist()])
