//! Images in object stores: the requests of each dialect, with faults; and real servers, if
//! `ZEBU_VERSITYGW`, `ZEBU_AZURITE` and `ZEBU_FAKE_GCS` name them (`make stores`).

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use crate::common::server::wait_until;
use crate::common::web::{Behaviour, images, served};
use crate::common::{Answer, Lab, Limits, beyond_qemu, program};

/// Runs the program with these variables.
pub fn run(lab: &Lab, variables: &str, args: &[&str]) -> Answer {
    let script = format!("{variables} exec \"$0\" \"$@\"");
    let mut all = vec!["-c", &script, program().to_str().unwrap()];
    all.extend(args);
    lab.run("sh".as_ref(), &all, b"", &Limits::default())
}

/// Names of each dialect with its environment, and how the first line of a request begins. PORT is
/// that of the server.
pub const DIALECTS: [(&str, &str, &str); 3] = [
    (
        "s3://bucket/some dir/x.qcow2",
        "AWS_ACCESS_KEY_ID=id AWS_SECRET_ACCESS_KEY=key AWS_REGION=here \
         AWS_ENDPOINT_URL=http://127.0.0.1:PORT",
        "GET /bucket/some%20dir/x.qcow2 ",
    ),
    (
        "gs://bucket/some dir/x.qcow2",
        "GOOGLE_SKIP_SIGNATURE=true GOOGLE_BASE_URL=http://127.0.0.1:PORT",
        "GET /bucket/some%20dir%2Fx%2Eqcow2 ",
    ),
    (
        "az://bucket/some dir/x.qcow2",
        "AZURE_STORAGE_ACCOUNT_NAME=me AZURE_STORAGE_ACCOUNT_KEY=a2V5 \
         AZURE_STORAGE_ENDPOINT=http://127.0.0.1:PORT",
        "GET /bucket/some%20dir/x.qcow2 ",
    ),
];

#[test]
fn each_dialect_is_spoken() {
    if beyond_qemu("object stores") {
        return;
    }
    let lab = images(24 << 20);
    for (name, variables, first) in DIALECTS {
        let web = served(&lab, "x.qcow2", Behaviour::default());
        let variables = variables.replace("PORT", &web.port().to_string());
        let run = |args: &[&str]| run(&lab, &variables, args);
        let info = run(&["info", name]).ok(name);
        assert!(
            info.out.starts_with(&format!("image: {name}\n")),
            "{info:#?}"
        );
        assert!(web.requests() <= 2, "{:#?}", web.heads());
        let head = web.heads().pop().unwrap();
        assert!(head.starts_with(first), "{head}");
        web.change(|behaviour| (behaviour.cut, behaviour.busy) = (5, 7));
        run(&["convert", "-O", "raw", name, "out.raw"]).ok(name);
        lab.assert_same_bytes("out.raw", "x.raw", name);
        web.change(|behaviour| {
            *behaviour = Behaviour {
                status: Some(404),
                ..Behaviour::default()
            }
        });
        run(&["info", name]).fails_with("not found");
        web.change(|behaviour| behaviour.status = Some(403));
        run(&["info", name]).fails_with("403");
        // By options, and what QEMU would show of it.
        web.change(|behaviour| behaviour.status = None);
        let driver = name.split(':').next().unwrap();
        let options =
            format!("driver=qcow2,file.driver={driver},file.url={name},file.readahead=1M");
        run(&["info", "--image-opts", &options]).ok("options");
        let answer = run(&["create", "-f", "raw", name, "1M"]);
        answer.fails_with("does not support image creation");
        run(&["resize", name, "1G"]).fails_with("does not support writes");
        fs::write(lab.path("empty"), "").unwrap();
        web.replace(&lab.path("empty"));
        run(&["info", "-f", "raw", name]).ok("an empty object");
    }
}

#[test]
fn keys_that_the_library_would_change_are_refused() {
    if beyond_qemu("object stores") {
        return;
    }
    let lab = images(1 << 20);
    for (name, variables, _) in DIALECTS {
        let web = served(&lab, "x.qcow2", Behaviour::default());
        let variables = variables.replace("PORT", &web.port().to_string());
        let scheme = name.split(':').next().unwrap();
        for key in ["/x", "x/", "a//x", "./x", "a/../x"] {
            let name = format!("{scheme}://bucket/{key}");
            let why = "a key must not begin or end with a slash";
            run(&lab, &variables, &["info", &name]).fails_with(why);
            let convert = ["convert", "-O", "raw", "x.qcow2", &name];
            run(&lab, &variables, &convert).fails_with(why);
        }
        assert_eq!(web.requests(), 0, "{name}");
    }
}

#[test]
fn names_that_are_none_are_refused() {
    if beyond_qemu("object stores") {
        return;
    }
    let lab = Lab::new();
    for name in [
        "s3:bucket/key",
        "s3://",
        "s3://bucket",
        "s3://bucket/",
        "s3:///key",
    ] {
        lab.zebu(&["info", name])
            .fails_with("not of the form s3://BUCKET/KEY");
    }
    let answer = lab.zebu(&["info", "--untrusted", "s3://bucket/key"]);
    answer.fails_with("must be a path");
}

#[test]
fn an_object_that_changes_is_noticed() {
    if beyond_qemu("object stores") {
        return;
    }
    let lab = images(32 << 20);
    let (name, variables, _) = DIALECTS[0];
    let web = served(&lab, "x.raw", Behaviour::default());
    let variables = variables.replace("PORT", &web.port().to_string());
    let (lab, web) = (&lab, &web);
    let answer = std::thread::scope(|scope| {
        let convert = scope.spawn(|| {
            // Few at once, so that some come after the change.
            let options = format!(
                "driver=raw,file.driver=s3,file.connections=2,file.readahead=1M,file.url={name}"
            );
            let args = [
                "convert",
                "-O",
                "raw",
                "-r",
                "40M",
                "--image-opts",
                &options,
                "out.raw",
            ];
            run(lab, &variables, &args)
        });
        wait_until("some bytes", || web.bytes() > 4 << 20);
        web.change(|behaviour| behaviour.etag = Some("\"second\"".into()));
        convert.join().unwrap()
    });
    answer.fails_with("has changed since it was opened");
}

/// Makes a container in Azurite, by the account and the key that all Azurites have
/// (https://learn.microsoft.com/azure/storage/common/storage-use-azurite).
const CONTAINER: &str = r#"
import base64, email.utils, hashlib, hmac, http.client, sys
account = "devstoreaccount1"
key = base64.b64decode(
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==")
headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
text = "PUT" + "\n" * 12
text += "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
text += f"/{account}/{account}/bucket\nrestype:container"
digest = hmac.new(key, text.encode(), hashlib.sha256).digest()
headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
server = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
server.request("PUT", f"/{account}/bucket?restype=container", headers=headers)
answer = server.getresponse()
sys.exit(0 if answer.status == 201 else answer.read().decode())
"#;

/// The SHA-256 of nothing.
const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// A real server with one bucket, until it is dropped.
pub struct RealStore {
    child: Child,
    port: u16,
    /// How it is reached.
    pub variables: String,
}

impl RealStore {
    /// The server that a variable names, with these arguments: PORT is the one to listen at. None:
    /// the variable is not set.
    fn start(lab: &Lab, variable: &str, args: &str, variables: &str) -> Option<RealStore> {
        let Some(server) = std::env::var_os(variable) else {
            println!("skipped: {variable} names no server");
            return None;
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let args = args.replace("PORT", &port.to_string());
        let child = Command::new(server)
            .args(args.split_whitespace())
            .current_dir(lab.path(""))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("the store listens", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Some(RealStore {
            child,
            port,
            variables: variables.replace("PORT", &port.to_string()),
        })
    }

    /// versitygw, which serves the folder `root` of the lab, with the bucket `bucket`.
    pub fn versitygw(lab: &Lab) -> Option<RealStore> {
        fs::create_dir_all(lab.path("root/bucket/some dir")).unwrap();
        let args = "--access id --secret key --port 127.0.0.1:PORT posix root";
        let variables = DIALECTS[0].1.replace("here", "us-east-1");
        RealStore::start(lab, "ZEBU_VERSITYGW", args, &variables)
    }

    /// fake-gcs-server, with a copy of the lab's folder `root` in memory.
    pub fn fake_gcs(lab: &Lab) -> Option<RealStore> {
        let args = "-scheme http -host 127.0.0.1 -port PORT -public-host 127.0.0.1:PORT \
                    -backend memory -data root";
        RealStore::start(lab, "ZEBU_FAKE_GCS", args, DIALECTS[1].1)
    }

    /// Azurite, with the container `bucket`.
    pub fn azurite(lab: &Lab) -> Option<RealStore> {
        let args = "--blobHost 127.0.0.1 --blobPort PORT --location root --silent \
                    --skipApiVersionCheck --disableTelemetry";
        let variables = "AZURE_STORAGE_USE_EMULATOR=true \
                         AZURITE_BLOB_STORAGE_URL=http://127.0.0.1:PORT";
        let store = RealStore::start(lab, "ZEBU_AZURITE", args, variables)?;
        fs::write(lab.path("container.py"), CONTAINER).unwrap();
        let args = ["container.py", &store.port.to_string()];
        let made = lab.run("python3".as_ref(), &args, b"", &Limits::default());
        assert_eq!(made.status, 0, "{made:#?}");
        Some(store)
    }

    /// How many uploads the bucket has that are neither completed nor aborted.
    pub fn uploads(&self) -> usize {
        let output = Command::new("curl")
            .args(["-sf", "--aws-sigv4", "aws:amz:us-east-1:s3"])
            .args([
                "-u",
                "id:key",
                "-H",
                &format!("x-amz-content-sha256: {EMPTY}"),
            ])
            .arg(format!("http://127.0.0.1:{}/bucket?uploads=", self.port))
            .output()
            .expect("curl");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("ListMultipartUploadsResult"), "{text}");
        text.matches("<UploadId>").count()
    }
}

impl Drop for RealStore {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn versitygw_is_read() {
    let lab = images(256 << 20);
    let Some(server) = RealStore::versitygw(&lab) else {
        return;
    };
    let variables = &server.variables;
    for format in ["raw", "qcow2"] {
        let file = format!("x.{format}");
        let object = format!("root/bucket/some dir/{file}");
        fs::copy(lab.path(&file), lab.path(&object)).unwrap();
        let name = format!("s3://bucket/some dir/{file}");
        let args = ["convert", "-f", format, "-O", "raw", &name, "out.raw"];
        run(&lab, variables, &args).ok(&name);
        lab.assert_same_bytes("out.raw", "x.raw", &name);
    }
    let wrong = variables.replace("SECRET_ACCESS_KEY=key", "SECRET_ACCESS_KEY=other");
    let answer = run(&lab, &wrong, &["info", "s3://bucket/some dir/x.raw"]);
    answer.fails_with("403");
    let missing = run(&lab, variables, &["info", "s3://bucket/none"]);
    missing.fails_with("not found");
}

/// It has no multipart uploads by Google's XML interface, so it is only read.
#[test]
fn fake_gcs_is_read() {
    let lab = images(96 << 20);
    fs::create_dir_all(lab.path("root/bucket/some dir")).unwrap();
    for file in ["x.raw", "x.qcow2"] {
        let object = format!("root/bucket/some dir/{file}");
        fs::copy(lab.path(file), lab.path(&object)).unwrap();
    }
    let Some(server) = RealStore::fake_gcs(&lab) else {
        return;
    };
    for format in ["raw", "qcow2"] {
        let name = format!("gs://bucket/some dir/x.{format}");
        let args = ["convert", "-f", format, "-O", "raw", &name, "out.raw"];
        run(&lab, &server.variables, &args).ok(&name);
        lab.assert_same_bytes("out.raw", "x.raw", &name);
    }
    let missing = run(&lab, &server.variables, &["info", "gs://bucket/none"]);
    missing.fails_with("not found");
}
