"""What a tool shows that is no text: a model that reads text alone is told that it was there.

What a user shows is refused, since no answer to it could be right. The result of a tool comes from
an agent, which sends it again with every later turn: refused, it would end the conversation for
good. It knows no dialect but the names of their parts.
"""

_KINDS = {
    "image": "image", "image_url": "image", "input_image": "image",
    "audio": "recording", "audio_url": "recording", "input_audio": "recording",
    "video": "video", "video_url": "video", "input_video": "video",
    "document": "file", "file": "file", "input_file": "file",
}  # fmt: skip


def told_of(kind: str) -> str | None:
    """What stands in a tool's result for a part of this type; None if it should have been text."""
    shown = _KINDS.get(kind)
    return shown and f"[Here was one {shown} that cannot be shown: this model reads text alone.]"
