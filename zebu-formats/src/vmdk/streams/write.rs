//! A streamOptimized VMDK that is written in order: header, descriptor, grains with their tables,
//! directory, footer.

use crate::Result;
use crate::drivers::stream::{Packing, Pipe, StreamImage, changed};
use crate::vmdk::header::SECTOR;
use crate::vmdk::stream::{
    GRAIN_BYTES, StreamStart, TABLE, grain_directory, grain_table, push_grain,
};

/// Grains that are written in the order of the disk.
pub struct Grains {
    start: StreamStart,
    /// The sectors of the grain tables that were written; 0: there is none.
    directory: Vec<u32>,
    /// The first sectors of the grains of the next table.
    table: Vec<u32>,
}

impl Grains {
    /// None yet.
    pub fn new(start: StreamStart) -> Self {
        Grains {
            start,
            directory: Vec::new(),
            table: Vec::new(),
        }
    }

    /// Writes the present table, unless it has no grains.
    fn end_table(&mut self, pipe: &mut Pipe) -> Result<()> {
        let sector = match self.table.is_empty() {
            true => 0,
            false => {
                self.table.resize(TABLE as usize, 0);
                let bytes = grain_table(&self.table);
                let sector = self.start.sector(pipe.length())? + 1;
                pipe.send(bytes)?;
                sector
            }
        };
        self.directory.push(sector);
        self.table.clear();
        Ok(())
    }
}

impl StreamImage for Grains {
    fn unit(&self) -> u64 {
        GRAIN_BYTES
    }

    fn packing(&self) -> Option<Packing> {
        Some(Packing::Zlib)
    }

    fn begin(&mut self, pipe: &mut Pipe) -> Result<()> {
        Ok(pipe.send(self.start.bytes())?)
    }

    fn write_packed(&mut self, pipe: &mut Pipe, offset: u64, data: &[u8]) -> Result<()> {
        let grain = offset / GRAIN_BYTES;
        let (table, entry) = (grain / TABLE, (grain % TABLE) as usize);
        while (self.directory.len() as u64) < table {
            self.end_table(pipe)?;
        }
        if (self.directory.len() as u64) > table || self.table.len() > entry {
            return Err(changed());
        }
        self.table.resize(entry, 0);
        self.table.push(self.start.sector(pipe.length())?);
        let mut bytes = Vec::with_capacity(data.len() + 2 * SECTOR as usize);
        push_grain(&mut bytes, offset, data);
        pipe.send(bytes)?;
        Ok(())
    }

    fn finish(mut self: Box<Self>, pipe: &mut Pipe) -> Result<()> {
        while (self.directory.len() as u64) < self.start.tables() {
            self.end_table(pipe)?;
        }
        let sector = self.start.sector(pipe.length())? + 1;
        pipe.send(grain_directory(&self.directory))?;
        pipe.send(self.start.end(sector))?;
        Ok(())
    }
}
