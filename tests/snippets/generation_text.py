from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)

with model.trace("The capital of France is", temperature=0.0, max_tokens=32) as tracer:
    out = tracer.result.save()

print(out.outputs[0].text)
print(out.outputs[0].token_ids[:8], out.outputs[0].finish_reason)
