//! Certificates for servers and clients under test.

use super::Lab;
use super::server::client;

/// Makes certificates of a server `localhost` and of a client with certtool, which must be installed.
/// Folders: `good`, `other` (of another authority), `wrong` (the authority of `good`, the client of
/// `other`), `none` (only the authority).
#[track_caller]
pub fn certificates(lab: &Lab) {
    let script = r#"
        set -e
        printf 'cn = "authority"\nca\ncert_signing_key\nexpiration_days = 100\n' >ca.info
        printf 'cn = "localhost"\ndns_name = "localhost"\nip_address = "127.0.0.1"\ntls_www_server\nencryption_key\nsigning_key\nexpiration_days = 100\n' >server.info
        printf 'cn = "client"\ntls_www_client\nencryption_key\nsigning_key\nexpiration_days = 100\n' >client.info
        for ca in good other; do
            mkdir $ca
            certtool --generate-privkey --key-type rsa --bits 2048 --outfile $ca/ca-key.pem
            certtool --generate-self-signed --load-privkey $ca/ca-key.pem --template ca.info --outfile $ca/ca-cert.pem
            for name in server client; do
                certtool --generate-privkey --key-type rsa --bits 2048 --outfile $ca/$name-key.pem
                certtool --generate-certificate --load-ca-certificate $ca/ca-cert.pem --load-ca-privkey $ca/ca-key.pem \
                    --load-privkey $ca/$name-key.pem --template $name.info --outfile $ca/$name-cert.pem
            done
        done
        mkdir wrong none
        cp good/ca-cert.pem other/client-*.pem wrong
        cp good/ca-cert.pem none
    "#;
    client(lab, "sh", &["-c", script]).ok("certificates");
}

/// Makes keys with psktool: `good/keys.psk` of users alice, bob and qemu; `wrong/keys.psk` of alice,
/// with another key, and of eve.
#[track_caller]
pub fn keys(lab: &Lab) {
    for (folder, user) in [
        ("good", "alice"),
        ("good", "bob"),
        ("good", "qemu"),
        ("wrong", "alice"),
        ("wrong", "eve"),
    ] {
        std::fs::create_dir_all(lab.path(folder)).unwrap();
        let file = format!("{folder}/keys.psk");
        client(lab, "psktool", &["-u", user, "-p", &file]).ok("psktool");
    }
}
