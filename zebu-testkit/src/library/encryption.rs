//! The dimension "encrypted" of generated images: one passphrase, which is found without a name.

use zebu::block::{Objects, Passphrases, Secret};
use zebu::internal::new_image::CreateOptions;
use zebu::jobs::{CreateQcow2, CreateValue, CreateValues};
use zebu::storage::Secrets;

/// Of all encrypted images of tests.
pub const PASSPHRASE: &str = "a passphrase of the tests";

/// What is asked for the passphrase of any image.
pub fn objects() -> Objects {
    let ask = Passphrases::new(|_| Some(Secret::new(PASSPHRASE)));
    Objects::default().passphrases(Some(ask))
}

/// The options of an image, with encryption by this cipher that takes little time to be unlocked. A shorter key
/// makes a smaller header.
pub fn encrypted(options: CreateQcow2, cipher: &str) -> CreateQcow2 {
    let text = format!(
        "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=1,encrypt.cipher-alg={cipher}"
    );
    let qcow2 = "qcow2".parse().expect("a format");
    let create = CreateOptions::parse(qcow2, &[text.into()]).expect("options");
    let values = create.with_secrets(secrets()).values(qcow2);
    let with = CreateQcow2::with_options(0, &values).expect("an encryption");
    options.encryption(with.encryption)
}

/// The options of a new container, with a small header.
pub fn container(values: CreateValues) -> CreateValues {
    let texts = [
        ("key-secret", "s"),
        ("cipher-alg", "aes-128"),
        ("cipher-mode", "cbc"),
    ];
    let with = |values: CreateValues, (name, text): (&str, &str)| {
        values.with(name, CreateValue::Text(text.into()))
    };
    let values = texts.into_iter().fold(values, with);
    values
        .with("iter-time", CreateValue::Number(1))
        .with_secrets(secrets())
}

fn secrets() -> Secrets {
    [("s".to_string(), Secret::new(PASSPHRASE))].into()
}
