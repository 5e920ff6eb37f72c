//! What the pool asks of physical memory. Implemented by a device's memory, and by any toy.

/// Whatever a backing has to say about a failure; the pool hands it on as an error's source.
pub type BackingError = Box<dyn std::error::Error + Send + Sync>;

/// Physical memory as the pool asks for it: a range of addresses is reserved, then memory is put behind it.
///
/// The pool calls in this order for each segment, always with the same address and length:
/// `reserve`, `map`, and at the end `unmap`, `release`. It never reads or writes the memory. Lengths
/// are multiples of [`PoolConfig::min_block`](super::PoolConfig::min_block), in bytes.
///
/// ```
/// use cudagraph_trees::pool::{Backing, BackingError, Pool, PoolConfig, StreamId, Tag};
///
/// /// Addresses only: nothing lies behind them.
/// struct Numbers(u64);
/// impl Backing for Numbers {
///     fn reserve(&mut self, bytes: u64) -> Result<u64, BackingError> {
///         self.0 += bytes;
///         Ok(self.0 - bytes)
///     }
///     fn map(&mut self, _: u64, _: u64) -> Result<(), BackingError> { Ok(()) }
///     fn unmap(&mut self, _: u64, _: u64) -> Result<(), BackingError> { Ok(()) }
///     fn release(&mut self, _: u64, _: u64) -> Result<(), BackingError> { Ok(()) }
/// }
///
/// let mut pool = Pool::new(PoolConfig::default(), Numbers(1 << 21))?;
/// let block = pool.alloc(StreamId(0), 1000, Tag(7))?;
/// assert_eq!((block.address(), block.bytes()), (1 << 21, 1024));
/// # Ok::<(), cudagraph_trees::pool::PoolError>(())
/// ```
pub trait Backing {
    /// Reserves `bytes` of address space and returns where it begins: never 0, a multiple of
    /// `min_block`, and apart from every range reserved and not yet released.
    ///
    /// # Errors
    /// When there is no room; nothing is reserved then.
    fn reserve(&mut self, bytes: u64) -> Result<u64, BackingError>;

    /// Puts memory behind a whole reserved range.
    ///
    /// # Errors
    /// When there is no memory; the range stays reserved and unmapped then, and the pool releases it.
    fn map(&mut self, address: u64, bytes: u64) -> Result<(), BackingError>;

    /// Takes the memory of a whole mapped range away again.
    ///
    /// # Errors
    /// The range stays mapped then, and the pool keeps it.
    fn unmap(&mut self, address: u64, bytes: u64) -> Result<(), BackingError>;

    /// Gives a whole reserved, unmapped range of addresses back.
    ///
    /// # Errors
    /// The range stays reserved then; the pool tries again when it is next trimmed.
    fn release(&mut self, address: u64, bytes: u64) -> Result<(), BackingError>;
}

impl<T: Backing + ?Sized> Backing for Box<T> {
    fn reserve(&mut self, bytes: u64) -> Result<u64, BackingError> {
        (**self).reserve(bytes)
    }

    fn map(&mut self, address: u64, bytes: u64) -> Result<(), BackingError> {
        (**self).map(address, bytes)
    }

    fn unmap(&mut self, address: u64, bytes: u64) -> Result<(), BackingError> {
        (**self).unmap(address, bytes)
    }

    fn release(&mut self, address: u64, bytes: u64) -> Result<(), BackingError> {
        (**self).release(address, bytes)
    }
}
