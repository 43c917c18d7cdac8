"""Upload a published folder to the Hugging Face hub (or a server that speaks its protocol: HF_ENDPOINT).

dspark push owner/name -c FILE [--layout=NAME] [--private] [--revision BRANCH]
"""

from __future__ import annotations

from pathlib import Path

from pipeline import identity
from pipeline.errors import ArtifactError, ConfigError, StorageError
from pipeline.layouts import files


def push(
    folder: str | Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    message: str = "Upload drafter",
) -> str:
    """Create `repository` when it does not exist and upload `folder` in one commit; returns its address.

    A name without owner is the token's own user's.

    The folder must be an unchanged export: what is uploaded is what was checked. `token` defaults to the hub client's
    own sources (HF_TOKEN, its login file); it is never printed.

    Raises:
        ArtifactError: the folder is no export, or was changed since.
        ConfigError: `repository` is no name a hub would take.
        StorageError: the server refused, or does not answer within two minutes.
    """
    folder = Path(folder)
    if not (folder / files.HASHES).exists():
        raise ArtifactError(f"{folder}: no {files.HASHES}; push takes one layout folder of an export")
    problems = files.hash_problems(folder)
    if problems:
        raise ArtifactError("\n".join(problems))
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(endpoint=endpoint, token=token)
    identity.limit_hub_waits()
    try:
        repository = api.create_repo(repository, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            folder_path=folder,
            repo_id=repository,
            revision=revision,
            commit_message=message,
            ignore_patterns=[".tmp", ".tmp/**"],
        )
    except HFValidationError as error:
        raise ConfigError(f"{repository}: {error}") from error
    except HfHubHTTPError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StorageError(f"{repository}: the server refused the upload ({reason})") from error
    except Exception as error:  # its http library's own, which no other part knows: not reached, or cut off
        if type(error).__name__ in ("ReadTimeout", "WriteTimeout"):
            waited = f"{identity.HUB_ANSWER_SECONDS:g} seconds"
            told = f"{api.endpoint} took the connection and was silent for {waited}; the same command tries again"
            raise StorageError(f"{repository}: not known to be uploaded: {told}") from error
        # Of a refusal behind it the number alone: large files go to signed addresses, which its text quotes.
        refusal = (
            f", HTTP {error.__cause__.response.status_code}" if isinstance(error.__cause__, HfHubHTTPError) else ""
        )
        raise StorageError(f"{repository}: not uploaded ({type(error).__name__}: {error}{refusal})") from error
    return str(commit.commit_url)
