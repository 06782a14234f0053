"""A small server of the Hub's protocol: repositories, branches, commits, large files and downloads."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """A Hub without accounts: who creates a repository by a token owns it.

    Attributes:
        repositories: Fields of each created repository, and the token of its `owner`.
        commits: (repository, branch, message, all files of the branch after the commit) in order.
        branches: Files of each (repository, branch).
        large: Contents of large files by their SHA-256.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.commits, self.branches, self.large = {}, [], {}, {}
        self.snapshots = {}

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, repository, revision="main"):
        """The files of a branch or a commit, or None."""
        return self.branches.get((repository, revision), self.snapshots.get((repository, revision)))

    def sha(self, repository, revision):
        """The name of a commit."""
        contents = sorted(
            (name, hashlib.sha1(body).hexdigest()) for name, body in self.files(repository, revision).items()
        )
        sha = hashlib.sha1(json.dumps([repository, contents]).encode()).hexdigest()
        self.snapshots[repository, sha] = self.files(repository, revision)
        return sha


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet: the system would hold a second one back for 40 ms

    def log_message(self, *words):
        pass

    def answer(self, fields=None, status=200, body=None, headers=()):
        body = json.dumps(fields).encode() if body is None else body
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code):
        self.answer({"error": code}, status, headers={"X-Error-Code": code, "X-Error-Message": code})

    @property
    def token(self):
        return (self.headers["Authorization"] or "").removeprefix("Bearer ")

    def is_hidden(self, repository):
        """Whether a repository does not exist for the sender, and then refuse the request."""
        fields = self.server.repositories.get(repository)
        is_hidden = fields is None or fields.get("visibility") == "private" and self.token != fields["owner"]
        if is_hidden:
            self.refuse(404 if self.token else 401, "RepoNotFound")
        return is_hidden

    def read(self):
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def do_PUT(self):
        body = self.read()
        self.server.large[hashlib.sha256(body).hexdigest()] = body
        self.answer({})

    def do_POST(self):
        body, path, hub = self.read(), unquote(urlsplit(self.path).path), self.server
        if path == "/api/repos/create":
            self.create_repository(json.loads(body))
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            objects = []
            for item in json.loads(body)["objects"]:
                upload = {"actions": {"upload": {"href": f"{hub.endpoint}/large"}}}
                objects.append({**item, **({} if item["oid"] in hub.large else upload)})
            self.is_hidden(match[1]) or self.answer({"transfer": "basic", "objects": objects})
        else:
            repository, verb, branch = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(\w+)/(.+)", path).groups()
            if not self.is_hidden(repository):
                self.write(repository, verb, branch, body)

    def create_repository(self, fields):
        hub = self.server
        name = "/".join(filter(None, [fields.get("organization"), fields["name"]]))
        if not self.token or hub.repositories.get(name, {}).get("owner", self.token) != self.token:
            self.refuse(403 if self.token else 401, "Forbidden")
            return
        hub.repositories.setdefault(name, {**fields, "owner": self.token})
        hub.branches.setdefault((name, "main"), {})
        self.answer({"url": f"{hub.endpoint}/{name}", "name": name})

    def write(self, repository, verb, branch, body):
        """Create a branch, or commit to one."""
        hub = self.server
        if hub.repositories[repository]["owner"] != self.token:
            self.refuse(403, "Forbidden")
        elif verb == "branch":
            if (repository, branch) in hub.branches:
                self.refuse(409, "BranchExists")
                return
            hub.branches[repository, branch] = dict(hub.files(repository))
            self.answer({})
        elif (repository, branch) not in hub.branches:
            self.refuse(404, "RevisionNotFound")
        elif verb == "preupload":
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        else:
            self.commit(repository, branch, [json.loads(line) for line in body.splitlines()])

    def commit(self, repository, branch, lines):
        hub, files = self.server, dict(self.server.files(repository, branch))
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.large[value["oid"]]
        (message,) = (line["value"]["summary"] for line in lines if line["key"] == "header")
        hub.branches[repository, branch] = files
        hub.commits.append((repository, branch, message, files))
        sha = hub.sha(repository, branch)
        self.answer({"commitUrl": f"{hub.endpoint}/{repository}/commit/{sha}", "commitOid": sha})

    def do_GET(self):
        path, hub = unquote(urlsplit(self.path).path), self.server
        if path == "/api/whoami-v2":
            self.answer({"name": "me", "type": "user"}) if self.token else self.refuse(401, "Unauthorized")
            return
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        facts = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+).*)?", path)
        if file is None and facts is None:  # data sets
            self.refuse(404, "RepoNotFound")
            return
        repository, revision = (file[1], file[2]) if file else (facts[1], facts[3] or "main")
        if self.is_hidden(repository):
            return
        files = hub.files(repository, revision)
        if files is None:
            self.refuse(404, "RevisionNotFound")
        elif file:
            self.send_file(files.get(file[3]), hub.sha(repository, revision))
        elif facts[2] == "tree":
            rows = [{"type": "file", "path": name, "size": len(text), "oid": "0"} for name, text in files.items()]
            self.answer(rows)
        else:
            siblings = [{"rfilename": name} for name in files]
            sha = hub.sha(repository, revision)
            self.answer({"id": repository, "modelId": repository, "sha": sha, "siblings": siblings, "tags": []})

    def send_file(self, body, sha):
        headers = {"X-Repo-Commit": sha}
        if body is None:
            self.answer({}, 404, headers={**headers, "X-Error-Code": "EntryNotFound"})
            return
        self.answer(body=body, headers={**headers, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'})

    do_HEAD = do_GET


@contextmanager
def running_hub():
    """Serve an empty Hub on this computer inside the block."""
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.shutdown()
