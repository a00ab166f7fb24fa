"""What a model's answer consists of: text, reasoning and tool calls, separated while it streams."""
