from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)

with model.trace("The capital of France is", temperature=0.8, top_p=0.95, seed=0, max_tokens=6) as tracer:
    steps = list().save()
    for step in tracer.all():
        probs = model.logits.float().softmax(-1)
        drawn = model.samples.item()
        steps.append((step, drawn, round(probs[0, drawn].item(), 3), probs.argmax().item()))

for step, drawn, p, greedy in steps:
    print(step, repr(model.tokenizer.decode(drawn)), p, "greedy:", repr(model.tokenizer.decode(greedy)))
