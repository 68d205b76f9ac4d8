--[[
slurm-resilience: a job that asks to be resilient, by the word "resilient" at the start of its comment, may be requeued
whatever the cluster's default is, and is refused with a sentence when it cannot work.  Every other job passes untouched.
An error in here lets the job pass.  Its log and its warning are cli_filter.lua's: slurmctld lets no plugin of 22.05 set them.

Put it beside slurm.conf as job_submit.lua, with JobSubmitPlugins=lua.  A site's own script goes on working as
job_submit_site.lua in the same folder: it is asked first, and its word is final.
]]

local SHORTEST_MIN = 2    -- below that, warning and saving would take all of the time
local UNSET, UNLIMITED = 4294967294, 4294967295

local folder = (debug.getinfo(1, "S").source:match("^@(.*/)")) or "/etc/slurm/"
slurm_job_submit, slurm_job_modify = nil, nil
local file = io.open(folder .. "job_submit_site.lua", "r")
if file then
  file:close()
  dofile(folder .. "job_submit_site.lua") -- a mistake in it is the site's, and is told as without us
end
local site_submit, site_modify = slurm_job_submit, slurm_job_modify

local function asks(job)
  local comment = job.comment
  return type(comment) == "string" and comment:match("^resilient%f[^%w_]") ~= nil
end

-- The sentence for the user, or nil when the request makes sense.
local function nonsense(job, minutes)
  if job.requeue == 0 then
    return "a resilient job comes back by being requeued: leave --no-requeue away, or the word resilient"
  end
  if minutes and minutes < SHORTEST_MIN then
    return string.format("a resilient job needs a time limit of at least %d minutes, or it saves and does nothing else", SHORTEST_MIN)
  end
  return nil
end

local function prepare(job)
  if not asks(job) then
    return slurm.SUCCESS
  end
  local minutes = job.time_limit
  if minutes == nil or minutes == UNSET or minutes == UNLIMITED then
    minutes = nil
  end
  local sentence = nonsense(job, minutes)
  if sentence then
    slurm.log_user("slurm-resilience: %s", sentence)
    return slurm.ERROR
  end
  job.requeue = 1
  return slurm.SUCCESS
end

function slurm_job_submit(job, partitions, uid)
  if site_submit then
    local answer = site_submit(job, partitions, uid)
    if answer ~= slurm.SUCCESS then
      return answer
    end
  end
  local worked, answer = pcall(prepare, job)
  if not worked then
    slurm.log_error("slurm-resilience: job_submit.lua: %s; the job passes", tostring(answer))
    return slurm.SUCCESS
  end
  return answer
end

function slurm_job_modify(job, record, partitions, uid)
  if site_modify then
    return site_modify(job, record, partitions, uid)
  end
  return slurm.SUCCESS
end

return slurm.SUCCESS
