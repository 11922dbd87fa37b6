from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)

with model.trace("The capital of France is", temperature=0.0):
    resid = list().save()
    for layer in model.model.layers:
        resid.append(sum(layer.output))

print(len(resid), resid[0].shape)
