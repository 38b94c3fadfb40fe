"""A module of the user's that cannot be imported."""

nothing  # noqa: B018, F821
