"""What vLLM is told: engine arguments, schedulers, how an engine is started and where its outputs go."""
