"""OpenTelemetry spans into training data for language-model reinforcement learning."""
