"""Format counts with a noun in singular or plural, for messages."""


def plural(count: float, singular: str, plural_form: str = "") -> str:
    """Return `count` with the noun: `1 pack`, `2 packs`. The default plural form adds an `s`."""
    noun = singular if count == 1 else plural_form or f"{singular}s"
    return f"{count:g} {noun}"
