//! Prints the public API that rustdoc has described as JSON.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let json = std::env::args_os()
        .nth(1)
        .ok_or("usage: zebu-public-api JSON")?;
    let api = public_api::Builder::from_rustdoc_json(json)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .build()?;
    print!("{api}");
    Ok(())
}
