import torch

from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)
berlin = model.tokenizer.encode(" Berlin")[0]

with model.trace("The capital of France is", temperature=0.0, max_tokens=8) as tracer:
    for step in tracer.iter[:8]:
        if step == 0:
            model.samples = torch.full_like(model.samples, berlin)
    out = tracer.result.save()

print(out.outputs[0].text)
