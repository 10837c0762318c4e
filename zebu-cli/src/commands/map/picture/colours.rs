//! The colours: the palette of Okabe and Ito, which colour-blind readers can tell apart
//! (<https://jfly.uni-koeln.de/color/>). Compressed data have a lighter shade.

use super::canvas::Colour;
use crate::images::survey::LAYERS;

/// Data of each image of the chain, from the top.
const LAYER: [Colour; LAYERS] = [
    [0, 114, 178],
    [230, 159, 0],
    [0, 158, 115],
    [204, 121, 167],
    [86, 180, 233],
    [110, 80, 50],
];
pub const ZERO: Colour = [176, 176, 176];
pub const EMPTY: Colour = [240, 240, 240];
/// The mark of what a snapshot holds, too.
pub const SHARED: Colour = [0, 0, 0];
pub const TEXT: Colour = [0, 0, 0];
pub const FAINT: Colour = [96, 96, 96];
/// What else is in the file.
pub const OTHER: Colour = [128, 128, 128];
pub const WARNING: Colour = [190, 60, 0];

/// Data of an image of the chain.
pub fn data(layer: usize) -> Colour {
    LAYER[layer.min(LAYERS - 1)]
}

/// Compressed data of an image of the chain.
pub fn compressed(layer: usize) -> Colour {
    data(layer).map(|part| part + ((255 - u16::from(part)) * 58 / 100) as u8)
}
