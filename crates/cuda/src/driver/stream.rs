//! Streams, what is recorded of their work as a CUDA graph, and moments in it.

use super::{Address, Device, Handle};
use crate::CudaError;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Looks at an event before the host sleeps between them, and how long.
const LOOKS: usize = 500;
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// A queue of work.
pub struct Stream {
    pub(super) device: Arc<Device>,
    pub(super) handle: Handle,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above, and from several: the driver is thread-safe.
unsafe impl Sync for Stream {}

/// What a stream is for. Communication comes first: it starts when its inputs are there, though kernels fill the device.
#[derive(Clone, Copy)]
pub enum Priority {
    /// Kernels.
    Kernels = 0,
    /// Collectives beside kernels.
    Collectives = -1,
    /// Messages, which wait for their receivers and hold up nothing else.
    Messages = -2,
}

impl Stream {
    /// A new one for kernels, independent of the default stream.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Self::with_priority(device, Priority::Kernels)
    }

    /// A new one.
    pub fn with_priority(device: &Arc<Device>, priority: Priority) -> Result<Self, CudaError> {
        const NON_BLOCKING: c_uint = 1;
        device.enter()?;
        let mut handle = std::ptr::null_mut();
        let status = (device.driver.stream_create)(&mut handle, NON_BLOCKING, priority as c_int);
        device.driver.check("cuStreamCreate", status)?;
        Ok(Self { device: device.clone(), handle })
    }

    /// The handle that libraries take.
    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    /// Waits until all of its work is done.
    pub fn wait(&self) -> Result<(), CudaError> {
        if self.device.watch().is_some() {
            return Event::mark(self)?.wait();
        }
        // SAFETY: the stream is open.
        self.device.driver.check("cuStreamSynchronize", unsafe { (self.device.driver.stream_synchronize)(self.handle) })
    }

    /// What is queued from here on waits for the event.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both are open.
        let status = unsafe { (self.device.driver.stream_wait_event)(self.handle, event.handle, 0) };
        self.device.driver.check("cuStreamWaitEvent", status)
    }

    /// Copies from the host.
    ///
    /// # Safety
    /// `to` has room for the data; pinned data stay as they are until the copy is done.
    pub unsafe fn to_device(&self, to: Address, data: &[u8]) -> Result<(), CudaError> {
        // SAFETY: the slice is as long as is said, and `to` has that room by the caller's word.
        unsafe { self.copy(to, data.as_ptr() as Address, data.len()) }
    }

    /// Copies to the host.
    ///
    /// # Safety
    /// `from` has as many bytes as `data`, which is not touched until the copy is done.
    pub unsafe fn to_host(&self, data: &mut [u8], from: Address) -> Result<(), CudaError> {
        // SAFETY: the slice is as long as is said, and `from` has as many bytes by the caller's word.
        unsafe { self.copy(data.as_mut_ptr() as Address, from, data.len()) }
    }

    /// Copies between any two places: the device's memory and the host's have one space of addresses.
    ///
    /// # Safety
    /// Both ranges exist and do not overlap.
    pub unsafe fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the ranges exist and are apart by the caller's word.
        self.device.driver.check("cuMemcpyAsync", unsafe { (self.device.driver.copy)(to, from, bytes, self.handle) })
    }

    /// Sets every byte of a range.
    ///
    /// # Safety
    /// The range exists.
    pub unsafe fn fill(&self, at: Address, byte: u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the range exists by the caller's word.
        self.device
            .driver
            .check("cuMemsetD8Async", unsafe { (self.device.driver.set_bytes)(at, byte, bytes, self.handle) })
    }

    /// Seconds that each of this many calls takes which `queue` puts here, one after the other.
    pub fn seconds(&self, times: usize, queue: impl Fn() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        let (start, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
        start.record(self)?;
        (0..times).try_for_each(|_| queue())?;
        end.record(self)?;
        end.wait()?;
        Ok(end.since(&start)? / times as f64)
    }

    /// Records what is queued here from now on, and on streams that wait for it, instead of doing it.
    pub fn begin_capture(self: &Arc<Self>) -> Result<Capture, CudaError> {
        const RELAXED: c_uint = 2;
        let driver = self.device.driver;
        // SAFETY: the stream is open and nothing of it is being captured.
        driver.check("cuStreamBeginCapture", unsafe { (driver.capture_begin)(self.handle, RELAXED) })?;
        Ok(Capture { stream: self.clone(), ended: false })
    }

    /// Launches the CUDA graph.
    pub fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        // SAFETY: both are open.
        self.device.driver.check("cuGraphLaunch", unsafe { (self.device.driver.graph_launch)(graph.exec, self.handle) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: created in `new`, destroyed once.
            unsafe { (self.device.driver.stream_destroy)(self.handle) };
        }
    }
}

/// A stream whose work is recorded. Where it is dropped before its end, what was recorded is forgotten.
pub struct Capture {
    stream: Arc<Stream>,
    ended: bool,
}

impl Capture {
    /// The CUDA graph of what was recorded.
    pub fn end(mut self) -> Result<Graph, CudaError> {
        let (driver, template) = (self.stream.device.driver, self.stop()?);
        let mut exec = std::ptr::null_mut();
        // SAFETY: the address is valid for the calls; the template is destroyed once.
        let made = unsafe {
            let status = (driver.graph_instantiate)(&mut exec, template, 0);
            (driver.graph_destroy)(template);
            driver.check("cuGraphInstantiate", status)
        };
        made.map(|()| Graph { device: self.stream.device.clone(), exec })
    }

    fn stop(&mut self) -> Result<Handle, CudaError> {
        self.ended = true;
        let (driver, mut template) = (self.stream.device.driver, std::ptr::null_mut());
        // SAFETY: the capture was begun; the address is valid for the call.
        let status = unsafe { (driver.capture_end)(self.stream.handle, &mut template) };
        driver.check("cuStreamEndCapture", status).map(|()| template)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // Whoever drops it has an error to tell.
        if self.ended {
            return;
        }
        if let Ok(template) = self.stop() {
            // SAFETY: the template is destroyed once.
            unsafe { (self.stream.device.driver.graph_destroy)(template) };
        }
    }
}

/// A CUDA graph.
pub struct Graph {
    device: Arc<Device>,
    exec: Handle,
}

// SAFETY: graphs may be used from any thread, one at a time.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: instantiated in `end`, destroyed once.
            unsafe { (self.device.driver.graph_exec_destroy)(self.exec) };
        }
    }
}

/// A moment in a stream's work.
pub struct Event {
    device: Arc<Device>,
    handle: Handle,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above, and from several: the driver is thread-safe.
unsafe impl Sync for Event {}

impl Event {
    /// A new one, with a clock.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Self::with_flags(device, 0)
    }

    /// Marks the end of what the stream has been given so far, for other streams. It has no clock.
    pub fn mark(stream: &Stream) -> Result<Arc<Self>, CudaError> {
        const DISABLE_TIMING: c_uint = 2;
        let event = Self::with_flags(&stream.device, DISABLE_TIMING)?;
        event.record(stream)?;
        Ok(Arc::new(event))
    }

    fn with_flags(device: &Arc<Device>, flags: c_uint) -> Result<Self, CudaError> {
        device.enter()?;
        let mut handle = std::ptr::null_mut();
        device.driver.check("cuEventCreate", (device.driver.event_create)(&mut handle, flags))?;
        Ok(Self { device: device.clone(), handle })
    }

    /// Marks the end of what the stream has been given so far.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both are open.
        self.device
            .driver
            .check("cuEventRecord", unsafe { (self.device.driver.event_record)(self.handle, stream.handle) })
    }

    /// Whether it has come.
    pub fn has_come(&self) -> Result<bool, CudaError> {
        const NOT_READY: c_int = 600;
        // SAFETY: the event is open.
        match unsafe { (self.device.driver.event_query)(self.handle) } {
            NOT_READY => Ok(false),
            status => self.device.driver.check("cuEventQuery", status).map(|()| true),
        }
    }

    /// Waits until it has come.
    pub fn wait(&self) -> Result<(), CudaError> {
        if let Some(watch) = self.device.watch() {
            let (mut looks, begin) = (0, Instant::now());
            while !self.has_come()? {
                watch(begin.elapsed())?;
                looks += 1;
                if looks < LOOKS { std::hint::spin_loop() } else { std::thread::sleep(LOOK_EVERY) }
            }
            return Ok(());
        }
        // SAFETY: the event is open.
        self.device.driver.check("cuEventSynchronize", unsafe { (self.device.driver.event_synchronize)(self.handle) })
    }

    /// Seconds from another event to this one; both have come.
    pub fn since(&self, earlier: &Event) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: both are open; the address is valid for the call.
        let status = unsafe { (self.device.driver.event_elapsed)(&mut milliseconds, earlier.handle, self.handle) };
        self.device.driver.check("cuEventElapsedTime", status)?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: created in `new`, destroyed once.
            unsafe { (self.device.driver.event_destroy)(self.handle) };
        }
    }
}
