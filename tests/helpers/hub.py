"""A small server of the Hub's protocol: repositories, commits and downloads."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """Attributes:
    repositories: Fields of each created repository.
    commits: (repository, branch, message, all files of the branch after the commit) in order.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.commits = {}, []

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, repository, branch="main"):
        files = [files for repo, name, _, files in self.commits if (repo, name) == (repository, branch)]
        return files[-1] if files else {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

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

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        path, hub = urlsplit(self.path).path, self.server
        if path == "/api/repos/create":
            fields = json.loads(body)
            name = "/".join(filter(None, [fields.get("organization"), fields["name"]]))
            hub.repositories.setdefault(name, fields)
            self.answer({"url": f"{hub.endpoint}/{name}", "name": name})
            return
        if path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
            return
        repository, verb, branch = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(\w+)/(.+)", path).groups()
        if verb == "preupload":
            files = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            self.answer({"files": modes})
            return
        lines = [json.loads(line) for line in body.splitlines()]
        files = dict(hub.files(repository, branch))
        for line in lines:
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        (message,) = (line["value"]["summary"] for line in lines if line["key"] == "header")
        hub.commits.append((repository, branch, message, files))
        oid = self.commit()
        self.answer({"commitUrl": f"{hub.endpoint}/{repository}/commit/{oid}", "commitOid": oid})

    def commit(self):
        return hashlib.sha1(str(len(self.server.commits)).encode()).hexdigest()

    def do_GET(self):
        path, hub = unquote(urlsplit(self.path).path), self.server
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repository, revision, name = match.groups()
            files = hub.files(repository, revision) or hub.files(repository)
            headers = {"X-Repo-Commit": self.commit()}
            if name not in files:
                code = "EntryNotFound" if repository in hub.repositories else "RepoNotFound"
                self.answer({}, 404, headers={**headers, "X-Error-Code": code})
                return
            etag = hashlib.sha1(files[name]).hexdigest()
            self.answer(body=files[name], headers={**headers, "ETag": f'"{etag}"'})
            return
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+).*)?", path)
        if match is None or match[1] not in hub.repositories:
            self.answer({}, 404, headers={"X-Error-Code": "RepoNotFound"})
            return
        files = hub.files(match[1], match[3] or "main") or hub.files(match[1])
        if match[2] == "tree":
            rows = [{"type": "file", "path": name, "size": len(text), "oid": "0"} for name, text in files.items()]
            self.answer(rows)
            return
        siblings = [{"rfilename": name} for name in files]
        self.answer({"id": match[1], "modelId": match[1], "sha": self.commit(), "siblings": siblings, "tags": []})

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
