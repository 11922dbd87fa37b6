from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)
prompts = ["Paris is in", "Berlin is in", "The capital of Japan is"]

with model.trace(temperature=0.0) as tracer:
    for prompt in prompts:
        with tracer.invoke(prompt):
            resid = sum(model.model.layers[10].output).save()
            token = model.logits.argmax(-1).save()

for p, r, t in zip(prompts, resid, token):
    print(f"{p!r:28} {tuple(r.shape)}  -> {model.tokenizer.decode(t)!r}")
