from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)

with model.trace("The capital of France is", temperature=0.0, max_tokens=8) as tracer:
    resid = list().save()
    for _ in tracer.iter[:8]:
        resid.append(sum(model.model.layers[10].output)[-1])  # the running token's row
    out = tracer.result.save()

print(len(resid), resid[0].shape, repr(out.outputs[0].text))
