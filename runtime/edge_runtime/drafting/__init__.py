"""How many tokens to draft: policies, and the cost and acceptance models behind them. Also prompt lookup."""
