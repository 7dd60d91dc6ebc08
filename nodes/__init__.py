"""The library of nodes: `reward.exact_match` is the class `ExactMatch` of `flowrl.nodes.reward.exact_match`."""

if __name__ == "nodes":
    # Imported under two names, every node class would exist twice and `isinstance` would tell them apart.
    raise ImportError("import the node library as 'flowrl.nodes', not as top-level 'nodes'")
