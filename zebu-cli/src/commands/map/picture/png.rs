//! A PNG file (<https://www.w3.org/TR/png-3/>): pixels of 8 bits for each of three colours.

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster};
use zebu_deflate::{Encoder, Level};

use super::canvas::{CHARACTER, Canvas, Colour};

/// Pixels.
pub struct Png {
    width: u32,
    height: u32,
    pixels: Vec<Colour>,
}

impl Png {
    /// A white picture.
    pub fn new(width: u32, height: u32) -> Self {
        Png {
            width,
            height,
            pixels: vec![[255; 3]; width as usize * height as usize],
        }
    }

    /// The pixels of a part of a row that are in the picture.
    fn row(&mut self, x: u32, y: u32, width: u32) -> &mut [Colour] {
        let (start, end) = (x.min(self.width), (x + width).min(self.width));
        match y < self.height {
            true => {
                let row = y as usize * self.width as usize;
                &mut self.pixels[row + start as usize..row + end as usize]
            }
            false => &mut [],
        }
    }

    /// Draws a character; `fill` of 255 is all of its colour.
    fn blend(&mut self, x: u32, y: u32, fill: u8, colour: Colour) {
        let fill = u32::from(fill);
        for pixel in self.row(x, y, 1) {
            for (to, from) in pixel.iter_mut().zip(colour) {
                *to = ((u32::from(*to) * (255 - fill) + u32::from(from) * fill) / 255) as u8;
            }
        }
    }
}

impl Canvas for Png {
    fn rectangle(&mut self, x: u32, y: u32, width: u32, height: u32, colour: Colour) {
        for y in y..y + height {
            self.row(x, y, width).fill(colour);
        }
    }

    fn text(&mut self, x: u32, y: u32, text: &str, colour: Colour) {
        for (nth, character) in (0..).zip(text.chars()) {
            let (weight, size) = (FontWeight::Regular, RasterHeight::Size16);
            let raster = get_raster(character, weight, size);
            let Some(raster) = raster.or_else(|| get_raster('?', weight, size)) else {
                continue;
            };
            for (down, row) in (0..).zip(raster.rows()) {
                for (right, fill) in (0..).zip(row.iter()) {
                    self.blend(x + nth * CHARACTER + right, y + down, *fill, colour);
                }
            }
        }
    }

    fn finish(self: Box<Self>) -> Vec<u8> {
        let mut header = Vec::new();
        header.extend(self.width.to_be_bytes());
        header.extend(self.height.to_be_bytes());
        // Bits, colours without transparency, the only methods, no interlacing.
        header.extend([8, 2, 0, 0, 0]);
        let mut rows = Vec::new();
        for row in self.pixels.chunks(self.width as usize) {
            // No filter.
            rows.push(0);
            rows.extend(row.as_flattened());
        }
        let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
        chunk(&mut file, b"IHDR", &header);
        chunk(&mut file, b"IDAT", &zlib(&rows));
        chunk(&mut file, b"IEND", &[]);
        file
    }
}

fn zlib(bytes: &[u8]) -> Vec<u8> {
    // More than stored blocks take.
    let mut stream = vec![0; bytes.len() + bytes.len() / 1000 + 1024];
    let length = Encoder::new().compress_zlib(Level::DEFAULT, bytes, &mut stream);
    stream.truncate(length.expect("room for stored blocks"));
    stream
}

fn chunk(file: &mut Vec<u8>, kind: &[u8; 4], content: &[u8]) {
    file.extend((content.len() as u32).to_be_bytes());
    let start = file.len();
    file.extend(kind);
    file.extend(content);
    let sum = crc32(&file[start..]);
    file.extend(sum.to_be_bytes());
}

/// The checksum of a chunk: that of zip and Ethernet.
fn crc32(bytes: &[u8]) -> u32 {
    let mut sum = u32::MAX;
    for byte in bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            let low = sum & 1;
            sum = (sum >> 1) ^ (0xedb8_8320 * low);
        }
    }
    !sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_an_empty_end() {
        // Every PNG ends with this chunk.
        assert_eq!(crc32(b"IEND"), 0xae42_6082);
    }

    #[test]
    fn what_is_outside_is_not_drawn() {
        let mut png = Png::new(4, 4);
        png.rectangle(2, 2, 9, 9, [0; 3]);
        png.text(3, 3, "W", [0; 3]);
        assert_eq!(png.pixels.iter().filter(|p| **p == [0; 3]).count(), 4);
    }
}
