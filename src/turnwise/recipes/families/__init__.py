"""The papers, one function each, one file per family. No arithmetic: only pieces and their hyper-parameters."""
