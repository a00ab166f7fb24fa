"""The Inference service (`InferenceServicer`): validation, admission, generation and beam search, output."""
