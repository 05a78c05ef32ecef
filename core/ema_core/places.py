"""Where the agent of one user keeps its sockets, by the rules that client and agent must agree on."""

from collections.abc import Mapping

CLIENT_SOCKET = "client.sock"
ADMIN_SOCKET = "admin.sock"


def runtime_folder(environ: Mapping[str, str], uid: int) -> str:
    """The agent's folder: `EMA_RUNTIME_DIR`, else `/run/ema` for root, else one in the user's own runtime folder."""
    if chosen := environ.get("EMA_RUNTIME_DIR"):
        return chosen
    if uid == 0:
        return "/run/ema"
    if own := environ.get("XDG_RUNTIME_DIR"):
        return f"{own}/ema"
    return f"/tmp/ema-{uid}"  # noqa: S108 - the agent refuses a folder that is not its own user's


def client_sockets(environ: Mapping[str, str], uid: int) -> list[str]:
    """Where a client looks for an agent, in order: what it was told, its own user's agent, the machine's."""
    if told := environ.get("EMA_SOCKET"):
        return [told]
    folders = dict.fromkeys([runtime_folder(environ, uid), "/run/ema"])
    return [f"{folder}/{CLIENT_SOCKET}" for folder in folders]
