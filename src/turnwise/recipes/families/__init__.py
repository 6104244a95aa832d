"""The methods by family: one function per paper, only pieces and hyper-parameters, no arithmetic."""
