from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)

with model.trace("The capital of France is", temperature=1.0, seed=0, max_tokens=8, n=3) as tracer:
    first = model.samples.item().save()
    out = tracer.result.save()

print(first)
print([c.text for c in out.outputs])
