from vllm.inputs import TokensPrompt

from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)
ids = model.tokenizer("The capital of France is")["input_ids"]

with model.trace(temperature=0.0, max_tokens=4) as tracer:
    with tracer.invoke(ids):
        a = tracer.result.save()
    with tracer.invoke(TokensPrompt(prompt_token_ids=ids)):
        b = tracer.result.save()

print(a.outputs[0].text == b.outputs[0].text, repr(a.outputs[0].text))
