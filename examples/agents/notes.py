"""What the agents of this folder share: a task of their own. Each row of the file has a question, notes, and the answer.

The question can only be answered by a search, and then by reading what the search gives: two calls of the policy.
`python experiments/agent_frameworks.py --rows tasks.jsonl` writes such a file.
"""

TOOL = {
    "name": "search",
    "description": "find notes",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
        "additionalProperties": False,
    },
}
MOST_CALLS = 5  # of the policy in one episode


def search(row, query):
    """The note that holds the query, or else most of its words."""
    query = str(query).lower()
    words = set(query.split())
    return max(row["notes"], key=lambda note: (query in note, len(words & set(note.rstrip(".").split()))))


def run_tool(row, name, arguments):
    """What the model called, with the arguments that it wrote: it makes mistakes, and is told."""
    if name != "search" or "query" not in arguments:
        return f"error: there is no {name} with these arguments; call search with a query"
    return search(row, arguments["query"])


def is_right(row, text):
    return text.strip().lower().rstrip(". ").endswith(row["answer"])
