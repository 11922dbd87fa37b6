from nnsight_async import VLLM

model = VLLM("Qwen/Qwen3-8B", dispatch=True)

with model.trace("The capital of France is", temperature=0.0, max_tokens=4, logprobs=3) as tracer:
    out = tracer.result.save()

for token_id, top in zip(out.outputs[0].token_ids, out.outputs[0].logprobs):
    print(repr(model.tokenizer.decode(token_id)), [(lp.decoded_token, round(lp.logprob, 2)) for lp in top.values()])
