"""A discrete-event simulation of the engine's scheduler: its own code, a model of the step time, a clock that jumps."""
