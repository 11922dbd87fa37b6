from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)

with model.trace("The capital of France is", temperature=0.0, max_tokens=1) as tracer:
    cache = tracer.cache(modules=[model.model.layers[i].mlp for i in range(0, 36, 12)])

print(list(cache.keys()))
# ['model.model.layers.0.mlp', 'model.model.layers.12.mlp', 'model.model.layers.24.mlp']
print(cache["model.model.layers.12.mlp"].output.shape)
# torch.Size([5, 4096])
