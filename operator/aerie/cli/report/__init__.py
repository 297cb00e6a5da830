"""`kubectl aerie report`: the record of a rollout's decision as one HTML file, as Markdown, or as a picture.

    resource, ConfigMap of records, events ─► contents ─► verdict ─┬─► charts ─► page       (HTML)
                                                                   └─────────► markdown   (with a picture beside it)

    command    the command line
    contents   what is known of one rollout, from all sources (pure)
    verdict    the decision in words
    charts     SVG by matplotlib, in colours that follow the reader's theme
    page       HTML, and its style
    markup     elements whose text is escaped

Guarantees: the same documents give the same report, byte for byte. All text of the cluster is escaped. A report loads nothing
from a network and runs no script. Not guaranteed: curves of rollouts whose record the operator has dropped.
"""
