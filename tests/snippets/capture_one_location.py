from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)

with model.trace("The capital of France is", temperature=0.0):
    hidden, residual = model.model.layers[10].output
    resid_post = (hidden + residual).save()  # the residual stream leaving block 10

print(resid_post.shape)
