"""What a model's answer consists of: text, reasoning and tool calls, told apart while it streams."""
