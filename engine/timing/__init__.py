"""How long steps and copies take, learnt while serving. Public face: CostModel."""
