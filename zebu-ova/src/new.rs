//! Appliances that are made.
//!
//! The archive begins with descriptor and manifest, whose lengths are known before the disks are.
//! Their space is kept, and its first header is written last: until then the file is no archive.

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use quick_xml::escape::escape;

use crate::archive::{self, BLOCK};
use crate::checksum::{Algorithm, Checksum};
use crate::manifest;
use crate::{Error, Result, href, refused};

/// Bytes of the longest name, so that those of all members fit into their headers.
const MAX_NAME: usize = 80;
/// Disks that a SCSI controller can have.
const MAX_DISKS: usize = 15;
/// The target of a SCSI bus that is the controller.
const CONTROLLER: usize = 7;

/// A disk of a new appliance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDisk {
    /// Its size in bytes.
    pub capacity: u64,
}

/// An archive (OVA) that is being made. Its disks are streamOptimized VMDKs.
///
/// The caller writes the image of the first disk into the file, from [`NewAppliance::offset`] on to
/// the end of the file, and calls [`NewAppliance::add`]; then the next one.
#[derive(Debug)]
pub struct NewAppliance<'a> {
    path: PathBuf,
    file: File,
    name: &'a str,
    disks: &'a [NewDisk],
    /// Virtual CPUs, and memory in MiB.
    cpus: u32,
    memory: u64,
    /// The lengths of the disks that were added.
    lengths: Vec<u64>,
    checksums: Vec<Checksum>,
    /// Bytes of the descriptor.
    descriptor: usize,
    /// The first byte of the next member.
    next: u64,
}

impl<'a> NewAppliance<'a> {
    /// Begins an appliance of this name in a file, which is emptied: it is open for reading and
    /// writing, and errors call it `path`. The machine has `cpus` virtual CPUs and `memory` MiB.
    ///
    /// # Errors
    /// If the name cannot be that of files, there are no or more than 15 disks, or the file cannot
    /// be written.
    pub fn begin(
        path: &Path,
        file: File,
        name: &'a str,
        disks: &'a [NewDisk],
        cpus: u32,
        memory: u64,
    ) -> Result<Self> {
        check_name(name)?;
        if disks.is_empty() || disks.len() > MAX_DISKS {
            return refused(format!("An appliance has 1 to {MAX_DISKS} disks"));
        }
        let mut new = NewAppliance {
            path: path.to_owned(),
            file,
            name,
            disks,
            cpus,
            memory,
            lengths: Vec::new(),
            checksums: Vec::new(),
            descriptor: 0,
            next: 0,
        };
        // With the longest numbers.
        new.descriptor = new.text(&vec![u64::MAX; disks.len()]).len();
        let checksum = Checksum::of_bytes(Algorithm::Sha256, b"");
        let manifest = new.manifest(&checksum, &vec![checksum.clone(); disks.len()]);
        new.next = member_end(new.descriptor) + member_end(manifest.len());
        new.io(|file| file.set_len(0))?;
        new.io(|file| file.set_len(new.next + BLOCK))?;
        Ok(new)
    }

    /// The name of the next disk's file.
    pub fn disk_name(&self) -> String {
        self.name_of(self.lengths.len())
    }

    /// Where in the file the image of the next disk starts, in bytes.
    pub fn offset(&self) -> u64 {
        self.next + BLOCK
    }

    /// Adds the disk whose image was written. Its checksum is computed; `progress` is given the
    /// bytes that were read for that.
    ///
    /// # Errors
    /// If the file cannot be read and written, or [`Error::Stopped`].
    ///
    /// # Panics
    /// If all disks were added.
    pub fn add(&mut self, progress: &mut dyn FnMut(u64) -> ControlFlow<()>) -> Result<()> {
        assert!(
            self.lengths.len() < self.disks.len(),
            "all disks were added"
        );
        let (start, end) = (self.offset(), self.io(|file| file.metadata())?.len());
        let length = end.saturating_sub(start);
        let range = start..end.max(start);
        let checksum =
            Checksum::of_file(Algorithm::Sha256, &self.file, &self.path, range, progress)?;
        self.write(self.next, &self.header(&self.disk_name(), length)?)?;
        self.next = end.next_multiple_of(BLOCK);
        self.io(|file| file.set_len(self.next + BLOCK))?;
        self.lengths.push(length);
        self.checksums.push(checksum);
        Ok(())
    }

    /// Makes the file a whole archive, durably.
    ///
    /// # Errors
    /// If the file cannot be written.
    ///
    /// # Panics
    /// If a disk is missing.
    pub fn finish(self) -> Result<()> {
        assert_eq!(self.lengths.len(), self.disks.len(), "a disk is missing");
        // Two blocks of zeroes end an archive.
        self.io(|file| file.set_len(self.next + 2 * BLOCK))?;
        let mut text = self.text(&self.lengths).into_bytes();
        text.resize(self.descriptor, b'\n');
        let checksum = Checksum::of_bytes(Algorithm::Sha256, &text);
        let manifest = self.manifest(&checksum, &self.checksums);
        let mut head = Vec::new();
        for (name, bytes) in [("ovf", &text[..]), ("mf", manifest.as_bytes())] {
            let name = format!("{}.{name}", self.name);
            head.extend(self.header(&name, bytes.len() as u64)?);
            head.extend(bytes);
            head.resize(head.len().next_multiple_of(BLOCK as usize), 0);
        }
        let (first, rest) = head.split_at(BLOCK as usize);
        self.write(BLOCK, rest)?;
        self.io(File::sync_all)?;
        self.write(0, first)?;
        self.io(File::sync_all)
    }

    fn io<T>(&self, action: impl FnOnce(&File) -> io::Result<T>) -> Result<T> {
        action(&self.file).map_err(Error::io(&self.path))
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.io(|file| file.write_all_at(bytes, offset))
    }

    fn header(&self, name: &str, length: u64) -> Result<[u8; BLOCK as usize]> {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let time = time.map_or(0, |time| time.as_secs());
        self.io(|_| archive::header(name, length, time))
    }

    fn name_of(&self, disk: usize) -> String {
        format!("{}-disk{}.vmdk", self.name, disk + 1)
    }

    fn manifest(&self, descriptor: &Checksum, disks: &[Checksum]) -> String {
        let mut text = manifest::line(&format!("{}.ovf", self.name), descriptor);
        for (nth, checksum) in disks.iter().enumerate() {
            text += &manifest::line(&self.name_of(nth), checksum);
        }
        text
    }

    /// The descriptor with disks of these lengths.
    fn text(&self, lengths: &[u64]) -> String {
        let (mut files, mut disks, mut items) = (String::new(), String::new(), String::new());
        for (nth, (disk, length)) in self.disks.iter().zip(lengths).enumerate() {
            let (number, capacity, href) = (nth + 1, disk.capacity, self.name_of(nth));
            let href = href::of_name(&href);
            let href = escape(&href);
            files += &format!(
                "    <File ovf:id=\"file{number}\" ovf:href=\"{href}\" ovf:size=\"{length}\"/>\n"
            );
            disks += &format!(
                "    <Disk ovf:diskId=\"disk{number}\" ovf:fileRef=\"file{number}\" \
                 ovf:capacity=\"{capacity}\" ovf:capacityAllocationUnits=\"byte\" \
                 ovf:format=\"{FORMAT}\"/>\n"
            );
            let target = nth + usize::from(nth >= CONTROLLER);
            items += &item(&[
                ("AddressOnParent", &target.to_string()),
                ("ElementName", &format!("Disk {number}")),
                ("HostResource", &format!("ovf:/disk/disk{number}")),
                ("InstanceID", &(3 + number).to_string()),
                ("Parent", "3"),
                ("ResourceType", "17"),
            ]);
        }
        let (name, cpus, memory) = (escape(self.name), self.cpus, self.memory);
        let processor = item(&[
            ("AllocationUnits", "hertz * 10^6"),
            ("ElementName", "Processors"),
            ("InstanceID", "1"),
            ("ResourceType", "3"),
            ("VirtualQuantity", &cpus.to_string()),
        ]);
        let memory = item(&[
            ("AllocationUnits", "byte * 2^20"),
            ("ElementName", "Memory"),
            ("InstanceID", "2"),
            ("ResourceType", "4"),
            ("VirtualQuantity", &memory.to_string()),
        ]);
        let controller = item(&[
            ("Address", "0"),
            ("ElementName", "SCSI controller"),
            ("InstanceID", "3"),
            ("ResourceSubType", "lsilogic"),
            ("ResourceType", "6"),
        ]);
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
             <Envelope xmlns=\"{OVF}\" xmlns:ovf=\"{OVF}\" xmlns:rasd=\"{RASD}\" \
             xmlns:vssd=\"{VSSD}\">\n\
             \x20 <References>\n{files}  </References>\n\
             \x20 <DiskSection>\n    <Info>Virtual disks</Info>\n{disks}  </DiskSection>\n\
             \x20 <VirtualSystem ovf:id=\"{name}\">\n\
             \x20   <Info>A virtual machine</Info>\n    <Name>{name}</Name>\n\
             \x20   <OperatingSystemSection ovf:id=\"1\">\n\
             \x20     <Info>The operating system is not known</Info>\n\
             \x20   </OperatingSystemSection>\n\
             \x20   <VirtualHardwareSection>\n      <Info>Virtual hardware</Info>\n\
             \x20     <System>\n        <vssd:ElementName>Virtual Hardware Family</vssd:ElementName>\n\
             \x20       <vssd:InstanceID>0</vssd:InstanceID>\n\
             \x20       <vssd:VirtualSystemIdentifier>{name}</vssd:VirtualSystemIdentifier>\n\
             \x20       <vssd:VirtualSystemType>{HARDWARE}</vssd:VirtualSystemType>\n\
             \x20     </System>\n{processor}{memory}{controller}{items}\
             \x20   </VirtualHardwareSection>\n  </VirtualSystem>\n</Envelope>\n"
        )
    }
}

const OVF: &str = "http://schemas.dmtf.org/ovf/envelope/1";
const RASD: &str =
    "http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData";
const VSSD: &str = "http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData";
const FORMAT: &str = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized";
/// The virtual hardware of ESX 5.5 and later.
const HARDWARE: &str = "vmx-10";

/// An item of virtual hardware. The schema requires its elements in alphabetical order.
fn item(parts: &[(&str, &str)]) -> String {
    let parts = parts
        .iter()
        .map(|(name, value)| format!("        <rasd:{name}>{value}</rasd:{name}>\n"));
    let parts: String = parts.collect();
    format!("      <Item>\n{parts}      </Item>\n")
}

/// Bytes of a member with its header.
fn member_end(length: usize) -> u64 {
    BLOCK + (length as u64).next_multiple_of(BLOCK)
}

fn check_name(name: &str) -> Result<()> {
    let is_bad = |c: char| c.is_control() || matches!(c, '/' | '\\' | '"');
    if name.is_empty() || name.len() > MAX_NAME || name.starts_with('.') || name.contains(is_bad) {
        return refused(format!(
            "The name of an appliance must have 1 to {MAX_NAME} bytes, without slashes, quotation \
             marks and control characters, and not begin with a dot"
        ));
    }
    Ok(())
}
