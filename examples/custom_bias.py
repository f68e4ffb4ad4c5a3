import torch, flash_fx

def attention(query, key, value, bias):
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5 + bias
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ value

fast = torch.compile(attention, backend=flash_fx)
print(flash_fx.explain(attention, *torch.randn(3, 2, 8, 256, 64), torch.randn(8, 256, 256)))
