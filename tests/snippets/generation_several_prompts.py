from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)

with model.trace(max_tokens=8) as tracer:
    with tracer.invoke("The capital of France is", temperature=0.0):
        cold = tracer.result.save()
    with tracer.invoke("The capital of France is", temperature=1.5, seed=1):
        hot = tracer.result.save()

print(repr(cold.outputs[0].text), repr(hot.outputs[0].text))
