"""How many tokens to draft: policies, the cost and acceptance models behind them, prompt lookup."""
