"""What runs once per node of an allocation: the agent, which stages the data and starts torchrun. No torch here."""
