"""After which age bodies are erased: the policies that people set, for the command."""
