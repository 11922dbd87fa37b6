from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)

with model.trace("The capital of France is", temperature=0.0, max_tokens=32) as tracer:
    ids = list().save()
    for step in tracer.iter[:32]:
        ids.append(model.samples.item())
        if step == 2:
            tracer.stop()

print(ids, repr(model.tokenizer.decode(ids)))
