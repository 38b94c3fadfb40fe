"""A plugin module that cannot be imported."""

nothing  # noqa: B018, F821
