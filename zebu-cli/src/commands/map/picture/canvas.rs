//! What a picture is drawn on.

use std::fmt::Write;

/// Width of a character in pixels, about.
pub const CHARACTER: u32 = 8;
/// Height of a line of text in pixels.
pub const LINE: u32 = 20;

/// Red, green, blue.
pub type Colour = [u8; 3];

/// A picture that is drawn, with its origin at the top left. Later shapes cover earlier ones.
pub trait Canvas {
    /// A filled rectangle.
    fn rectangle(&mut self, x: u32, y: u32, width: u32, height: u32, colour: Colour);
    /// A line of text in a font of fixed width, with its top left corner.
    fn text(&mut self, x: u32, y: u32, text: &str, colour: Colour);
    /// The file.
    fn finish(self: Box<Self>) -> Vec<u8>;
}

/// An SVG file.
pub struct Svg(String);

impl Svg {
    pub fn new(width: u32, height: u32) -> Self {
        Svg(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"DejaVu Sans Mono, Liberation Mono, \
             monospace\" font-size=\"13\" shape-rendering=\"crispEdges\">\n"
        ))
    }
}

impl Canvas for Svg {
    fn rectangle(&mut self, x: u32, y: u32, width: u32, height: u32, colour: Colour) {
        let colour = hex(colour);
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(
            self.0,
            "<path fill=\"{colour}\" d=\"M{x} {y}h{width}v{height}h-{width}z\"/>"
        );
    }

    fn text(&mut self, x: u32, y: u32, text: &str, colour: Colour) {
        let text = text
            .replace('&', "&amp;")
            .replace('<', "&lt;")
            .replace('>', "&gt;")
            // XML cannot have these.
            .replace(['\u{fffe}', '\u{ffff}'], "?");
        let _ = writeln!(
            self.0,
            "<text x=\"{x}\" y=\"{}\" fill=\"{}\" xml:space=\"preserve\">{text}</text>",
            y + 13,
            hex(colour)
        );
    }

    fn finish(mut self: Box<Self>) -> Vec<u8> {
        self.0.push_str("</svg>\n");
        self.0.into_bytes()
    }
}

fn hex([red, green, blue]: Colour) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}
