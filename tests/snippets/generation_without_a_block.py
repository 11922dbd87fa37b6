from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)
outputs = model.generate(["The capital of France is", "The capital of Japan is"], temperature=0.0, max_tokens=8)
print([o.outputs[0].text for o in outputs])
