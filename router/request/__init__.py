"""The Inference service (`InferenceServicer`): validation, admission, generation, output."""
