"""What can be reproduced, by name, in the order of the paper; free of torch, for the help."""

ALL = "all"
NAMES = (
    "table1",
    "table2",
    "figure3",
    "figure4",
    "figure5",
    "table5",
    "table6",
    "figure6",
    "figure7",
    "transfer",
    "selfsupervised",
    "figure8",
    "heads",
    "table8",
    "figure10",
    "figure11",
)
