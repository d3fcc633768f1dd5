"""A server that speaks as much of Google Cloud Storage's XML API as the clients of obstore and polars do.

    python gcs_server.py FOLDER

It writes FOLDER/account.json, the service account that it is reached by, prints its port and ends with its standard
input. As the real one it wants signed requests, gives each put a generation, heeds `x-goog-if-generation-match` and
answers 404 to a delete of nothing. Unlike it, a page of a listing has 3 names, and changes under lossy/ get a 503.
"""

import json
import socket
import sys
import threading
from base64 import urlsafe_b64decode
from collections import defaultdict
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Final
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import uvicorn
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import request_response

FOLDER: Final = Path(sys.argv[1])
KEY: Final = rsa.generate_private_key(65537, 2048)
NUMBERS: Final = count(1_700_000_000_000_000)
BUCKETS: Final = dict[str, defaultdict[str, int]]()
"""For each key of a bucket the generation of its object, which names the file of its content, or 0 for none."""
LOST: Final = set[tuple[str, ...]]()


def signed(authorization: str) -> bool:
    """Whether a token was signed by the service account."""
    content, _, signature = authorization.removeprefix("Bearer ").rpartition(".")
    try:
        KEY.public_key().verify(urlsafe_b64decode(signature + "=="), content.encode(), padding.PKCS1v15(), SHA256())
    except InvalidSignature:
        return False
    return True


def xml(name: str, content: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer that is one element."""
    return Response(f"<{name}>{content}</{name}>", status, headers)


def listing(objects: defaultdict[str, int], after: str, prefix: str, delimiter: str) -> Response:
    """Keys and common prefixes in the order of names."""
    entries = dict[str, str]()
    for key in sorted(key for key in objects if objects[key] and key.startswith(prefix)):
        rest, more, _ = key.removeprefix(prefix).partition(delimiter or "\0")
        about, name = (FOLDER / str(objects[key])).stat(), escape(prefix + rest + more)
        put = datetime.fromtimestamp(about.st_mtime, UTC).isoformat()
        one = f"<Key>{name}</Key><LastModified>{put}</LastModified><Size>{about.st_size}</Size>"
        folder = f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
        entries[prefix + rest + more] = folder if more else f"<Contents>{one}</Contents>"
    names = [name for name in entries if name > after]
    token = f"<NextContinuationToken>{escape(names[2])}</NextContinuationToken>" if len(names) > 3 else ""
    return xml("ListBucketResult", token + "".join(entries[name] for name in names[:3]))


async def answer(request: Request) -> Response:
    """What comes of one request."""
    method, query, headers, body = request.method, request.query_params, request.headers, await request.body()
    bucket, _, key = request.scope["path"][1:].partition("/")
    if method == "PUT" and not key:
        BUCKETS[bucket] = defaultdict(int)
        return Response()
    if not signed(headers.get("Authorization", "")):
        return xml("Code", "AuthenticationRequired", 401)
    if bucket not in BUCKETS:
        return xml("Code", "NoSuchBucket", 404)
    objects, upload = BUCKETS[bucket], query.get("uploadId")
    if not key:
        return listing(objects, *(query.get(name, "") for name in ("continuation-token", "prefix", "delimiter")))
    if method == "POST" and upload is None:
        return xml("InitiateMultipartUploadResult", f"<UploadId>{next(NUMBERS)}</UploadId>")
    if method == "PUT" and upload is not None:
        (FOLDER / f"{upload}.{query['partNumber']}").write_bytes(body)
        return Response(headers={"ETag": f"{upload}.{query['partNumber']}"})
    source = unquote(headers.get("x-goog-copy-source", "")).partition("/")[2]
    if (method not in ("PUT", "POST") and not objects[key]) or (source and not objects[source]):
        return xml("Code", "NoSuchKey", 404)
    if method in ("GET", "HEAD"):
        about = {"ETag": str(objects[key]), "x-goog-generation": str(objects[key])}
        return FileResponse(FOLDER / str(objects[key]), headers=about)
    if (condition := headers.get("x-goog-if-generation-match")) not in (None, str(objects[key])):
        return xml("Code", "PreconditionFailed", 412)
    if method == "POST":
        body = b"".join((FOLDER / str(one.text)).read_bytes() for one in ElementTree.fromstring(body).iter("ETag"))
    elif source:
        body = (FOLDER / str(objects[source])).read_bytes()
    objects[key] = next(NUMBERS) if method != "DELETE" else 0
    (FOLDER / str(objects[key])).write_bytes(body)
    if key.startswith("lossy/") and (change := (method, bucket, key, str(condition))) not in LOST:
        LOST.add(change)
        return xml("Code", "ServiceUnavailable", 503)
    about = {"ETag": str(objects[key]), "x-goog-generation": str(objects[key])}
    return xml("CompleteMultipartUploadResult", f"<ETag>{objects[key]}</ETag>", 200, about)


with socket.create_server(("127.0.0.1", 0)) as listening:
    port = listening.getsockname()[1]
    pem = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    account = {"private_key": pem, "private_key_id": "1", "client_email": "tests@example.org"}
    (FOLDER / "account.json").write_text(json.dumps({**account, "gcs_base_url": f"http://127.0.0.1:{port}"}))
    print(port, flush=True)
    serve = uvicorn.Server(uvicorn.Config(request_response(answer), lifespan="off", log_level="warning")).run
    threading.Thread(target=serve, kwargs={"sockets": [listening]}, daemon=True).start()
    sys.stdin.read()
